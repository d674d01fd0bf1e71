"""From log files to one attribution.

analyzer           the analysis for callers that wait: on an event loop, or in a thread
analysis           one analysis in the calling thread, of a cycle and of those before it
gathering          the same of a large cycle, whose logs the agents have read
node_findings      what an agent has found in its node's logs, as it is sent
evidence           reads what analysis needs beside the scan: tails, stacks, flight-recorder dumps
llm                asks a language model where the rules do not know
unpickling         reads a pickle of plain values, and runs nothing in it

Pure, from facts to conclusions:

attributing        the attribution as a whole
findings           the scan's hits, placed on a rank, a node and a common clock
aftermath          what a rank did after a line: whether that line ended it
cause              which finding is where it began
collectives        which ranks the others waited for
flight_recorder    what a dump of PyTorch's flight recorder says
spread             which ranks and nodes share the cause
verdict            which verdict the evidence allows, and how sure it is
"""
