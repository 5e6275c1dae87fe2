"""Planners of the throughput systems: which batches, and what lies where, by a roofline of the machine and its memory."""

from .cox_moe import plan as cox_moe
from .flexgen import plan as flexgen
from .model import MACHINES, Choice, Load, Machine, Model, NoRoom
from .moe_lightning import plan as moe_lightning

PLANNERS = {"flexgen": flexgen, "moe_lightning": moe_lightning, "cox_moe": cox_moe}

__all__ = ["MACHINES", "PLANNERS", "Choice", "Load", "Machine", "Model", "NoRoom", "cox_moe", "flexgen", "moe_lightning"]
