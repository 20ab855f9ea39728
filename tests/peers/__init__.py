"""Receivers that are programs of their own."""
