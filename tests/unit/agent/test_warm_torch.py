"""torch in workers that are forked from a warm process."""

from __future__ import annotations

import json
import sys
from unittest.mock import ANY

import pytest

from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from tests.unit.agent.test_warm_equality import Node, node  # noqa: F401  the fixture

pytestmark = pytest.mark.torch

MODULES = ("torch", "torch.distributed", "torch._dynamo", "torch.utils.data", "numpy.random", "seeding")
SEEDING = """
import numpy, torch
{seed}
FIXED = numpy.random.default_rng(5)
OWN = numpy.random.default_rng()
LONG = numpy.random.default_rng(0x87351080e25cb0fad77a44a3be03b491)
LEGACY = numpy.random.RandomState()
"""
DRAWING = """
import json, numpy, random, seeding, torch
ours = numpy.random.default_rng(1)
print(json.dumps({
    "torch": torch.rand(2).tolist(), "initial": torch.initial_seed(), "numpy": numpy.random.rand(2).tolist(),
    "own": seeding.OWN.random(), "fixed": seeding.FIXED.random(), "long": seeding.LONG.random(),
    "legacy": seeding.LEGACY.rand(), "spawned": seeding.OWN.spawn(1)[0].random(), "new": ours.random(),
    "generator": torch.rand(1, generator=torch.Generator()).tolist(), "fresh": numpy.random.default_rng().random(),
}))
"""
WORKING = """
import json, os, threading, torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    torch.manual_seed(7)
    first, seen = torch.randn(300, 300), {}
    seen["threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    seen["matmul"] = (first @ first).sum().item()
    image = torch.randn(4, 3, 32, 32, requires_grad=True)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    layers(image).square().mean().backward()
    seen["backward"] = image.grad.abs().sum().item()
    optimizer = torch.optim.AdamW(layers.parameters())
    optimizer.step()
    seen["step"] = sum(each.sum().item() for each in layers.parameters())
    seen["linalg"] = torch.linalg.svdvals(first)[0].item()
    seen["fft"] = torch.fft.fft(first).abs().sum().item()
    data = TensorDataset(torch.arange(20.0))
    for context in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context, shuffle=True)
        seen[context] = [each.tolist() for (each,) in loader]
    seen["parallel"] = torch.__config__.parallel_info().split("Environment")[0]
    seen["cpu"] = [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.cuda.is_available()]
    print(json.dumps(seen))

if __name__ == "__main__":
    main()
"""
# The first DistributedDataParallel would import torch.distributed.nn, whose functions would keep the group.
TRAINING = """
import gc, json, os, pathlib, torch, torch.distributed as dist, torch.distributed.nn
url = "tcp://127.0.0.1:" + os.environ["PORT"]
dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
gathered = [None, None]
dist.all_gather_object(gathered, [each.tolist() for each in model.parameters()])
assert gathered[0] == gathered[1]
print(json.dumps(gathered))
del model, optimizer
gc.collect()  # frees the model: a thread of Gloo that outlives the interpreter can abort the process
dist.destroy_process_group()
names = [task.read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop" not in names, names
"""


def write(folder, program, seed=""):
    (folder / "seeding.py").write_text(SEEDING.format(seed=seed))
    (folder / "train.py").write_text(program)
    return [sys.executable, "-W", "ignore", "train.py"]


@pytest.mark.parametrize("seed", ["", "torch.manual_seed(3); numpy.random.seed(3)"])
async def test_warm_siblings_draw_different_random_numbers(node, tmp_path, seed):  # noqa: F811
    """Generators of numpy and torch, and those derived from them, differ between siblings, except those that were
    seeded with a number."""
    argv = write(tmp_path, DRAWING, seed)
    cold = json.loads((await node.run(argv, cwd=tmp_path, warm=False))[3])
    assert (await node.warm(argv, MODULES, cwd=tmp_path, ahead=1))[:3] == ("ready", ANY, ANY)
    warm = [json.loads(each[3]) for each in await node.run_all(argv, cwd=tmp_path, warm=True, ranks=range(3))]
    fixed = {"fixed", "long", "new", "generator"} | ({"torch", "initial", "numpy"} if seed else set())
    for name in cold:
        drawn = [json.dumps(each[name]) for each in (cold, *warm)]
        assert len(set(drawn)) == (1 if name in fixed else len(drawn)), name


@pytest.mark.parametrize("threads", ["", "1", "2"])
async def test_torch_computes_the_same_cold_and_warm(node, tmp_path, threads):  # noqa: F811
    """torch computes the same cold and warm: with as many threads, in backward, and in the workers of a DataLoader.
    The threads of numpy's OpenBLAS are no reason to refuse."""
    argv = write(tmp_path, WORKING)
    env = {"OMP_NUM_THREADS": threads} if threads else {}
    cold = await node.run(argv, cwd=tmp_path, warm=False, **env)
    assert cold[0] == 0, cold[4].decode()
    assert (await node.warm(argv, MODULES, cwd=tmp_path, **env))[::2][:1] == ("ready",)
    warm = await node.run(argv, cwd=tmp_path, warm=True, **env)
    assert warm[:5] == cold[:5]


async def test_warm_ranks_train_together(node, tmp_path):  # noqa: F811
    """gloo and DistributedDataParallel work in two forks of one warm process, and in its next two forks."""
    argv = write(tmp_path, TRAINING)
    found = []
    assert (await node.warm(argv, MODULES, cwd=tmp_path, ahead=2))[0] == "ready"
    for is_warm in (False, True, True):
        port = free_ports(1)[0]
        both = await node.run_all(argv, cwd=tmp_path, warm=is_warm, ranks=(0, 1), PORT=str(port))
        assert [each[0] for each in both] == [0, 0], both[0][4].decode() + both[1][4].decode()
        found += [each[3] for each in both]
    assert len(set(found)) == 1


async def test_module_that_leaves_torchs_threads_is_refused(node, tmp_path):  # noqa: F811
    """A module whose import starts torch's threads is refused: a fork would not have them, and torch would wait for
    them."""
    argv = write(tmp_path, "", "torch.set_num_threads(2); torch.rand(2000, 2000) @ torch.rand(2000, 2000)")
    said = await node.warm(argv, MODULES, cwd=tmp_path)
    assert said[:2] == ("refused", "seeding")
    assert "thread" in said[2]
