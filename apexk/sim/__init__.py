"""Routing traces and runs of the engine over them on a modelled clock: no model, no tensors, no second engine."""
