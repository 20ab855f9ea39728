"""Receivers that behave as a real service does, or are one."""
