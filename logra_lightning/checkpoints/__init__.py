"""Checkpoints that are whole or not there, and work that a signal must not leave half done."""
