"""The Hugging Face seam: which models apexk knows, and how it is swapped into one and out again."""
