"""The delivery of changes: the courier's process, its supervisor in the agent, and the sinks."""
