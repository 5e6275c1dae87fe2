"""What this machine has and allows: memory, control groups, processors, GPUs. Standard library only."""
