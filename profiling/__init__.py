"""Reads timelines and profiles from files and shows them; imports neither torch nor the engine."""
