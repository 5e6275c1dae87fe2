"""The engine: turns a policy's plan into a device's operations, layer by layer."""
