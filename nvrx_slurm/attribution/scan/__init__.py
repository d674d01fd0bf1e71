"""Logs of any size and layout, read once, with bounded memory: lines that a rule recognises.

| module | what it does |
|---|---|
| `model.py` | what reading finds: `LogFile`, `Hit`, `Scan` |
| `finding.py`, `naming.py` | the log files below some paths, and whose they are by their names |
| `opening.py` | a file's text, unpacked, piece by piece |
| `blocks.py` | whole lines of it, of bounded length |
| `prefilter.py` | which rules can match lines of a block |
| `vectorscan.py` | what it searches with, kept from process to process |
| `matching.py`, `lines.py` | which lines do match, and the first and last of them |
| `hits.py` | what such a line tells: by `labels.py` whose it is, by `stamps.py` when, by `tracebacks.py` from where |
| `asides.py` | whether a traceback ended its process |
| `text.py` | a line's bytes as text |
| `scanning.py` | all of it, for many files at a time |
"""

from nvrx_slurm.attribution.scan.files import find_logs
from nvrx_slurm.attribution.scan.model import Hit, Kind, LogFile, Scan
from nvrx_slurm.attribution.scan.scanning import scan

__all__ = ["Hit", "Kind", "LogFile", "Scan", "find_logs", "scan"]
