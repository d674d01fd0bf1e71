"""What tests of jobs need: real faults, on purpose. Product code: it is what the demo and the flow tests use."""
