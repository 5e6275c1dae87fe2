"""Models and prompts for the command line, and end-to-end times of a model with and without apexk."""
