"""The run: planner, window loop, metrics."""
