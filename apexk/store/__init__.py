"""Where expert weights live: the expert block, the host store, the slots of the GPU pool."""
