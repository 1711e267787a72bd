"""Tests of the host process as its workers, and others, meet it."""
