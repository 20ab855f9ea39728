"""The process on each VM: polls, keeps the state, serves what is known."""
