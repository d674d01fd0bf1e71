"""A transformers Trainer that resumes from its last checkpoint."""

import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

OUT = common.FOLDER / "checkpoints"


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 8) % 30
        return {"input_ids": tokens, "labels": tokens}


class Hold(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        common.began(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        common.hold(state.global_step)


def last_whole_checkpoint() -> str | None:
    """transformers' get_last_checkpoint takes the newest folder, also one whose writer was killed. The last file that
    is written is trainer_state.json."""
    whole = [state.parent for state in OUT.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda folder: int(folder.name.partition("-")[2]))) if whole else None


def main() -> None:
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    arguments = TrainingArguments(
        output_dir=str(OUT),
        max_steps=24,
        save_steps=5,
        save_total_limit=2,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Hold()])
    trainer.train(resume_from_checkpoint=last_whole_checkpoint())
    batch = [Sentences()[index] for index in range(64)]
    with torch.no_grad():
        loss = model(**{name: torch.stack([each[name] for each in batch]) for name in batch[0]}).loss.item()
    common.conclude(loss, trainer.state.global_step)


if __name__ == "__main__":
    main()
    common.end_group()
