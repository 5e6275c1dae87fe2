"""Trains predictors of expert loads from routing traces, and says how good they are on steps that they were not trained on."""
