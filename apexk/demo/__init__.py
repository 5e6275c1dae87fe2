"""The main job on a machine with no GPU: a small trained MoE, swapped, compared with itself, timed on a model of a machine."""
