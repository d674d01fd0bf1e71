"""Logs of any size and layout, read once, with bounded memory: lines that a rule recognises.

model         what a scan finds: `LogFile`, `Hit`, `FileScan`, `Scan`
files         the log files below some paths, whose they are by their names, and their text, unpacked
blocks        whole lines of the text, of bounded length
records       what lines say that are JSON objects
prefilter     which rules can match lines of a block
vectorscan    the search that the prefilter uses, if the extra is installed
matching      which lines do match, and a `Hit` for the first and last of them
prefixes      what stands before a line: the label of its writer, and the time stamp
quotations    lines that hold a failure's words and report none
tracebacks    the traceback that a line ends, and whether it ended its process
scanning      all of it, for many files; where a file's later runs may begin
"""

from nvrx_slurm.attribution.scan.files import find_logs
from nvrx_slurm.attribution.scan.model import Hit, LogFile, LogKind, Scan
from nvrx_slurm.attribution.scan.scanning import scan

__all__ = ["Hit", "LogFile", "LogKind", "Scan", "find_logs", "scan"]
