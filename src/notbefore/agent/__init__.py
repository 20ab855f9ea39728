"""The always-on process: polls, keeps the state, serves what is known."""
