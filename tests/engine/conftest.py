import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # `oracle`: importlib mode gives test modules no package
