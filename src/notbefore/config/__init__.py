"""YAML, environment and command line, to frozen structs."""
