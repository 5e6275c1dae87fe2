"""The Apex paper's figures and tables, computed here and held against the numbers that its text states."""
