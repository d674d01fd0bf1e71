"""The batch host: what the job script becomes.

It keeps the store and the controller running, starts the agents, passes signals on, ends with the job's exit code.
"""
