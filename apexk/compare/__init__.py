"""The systems of the field side by side: one engine, one loader, one set of costs; only who decides differs."""
