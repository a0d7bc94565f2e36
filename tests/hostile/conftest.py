import sys
from pathlib import Path

# bundles.py of the manifests' tests, and the cases beside this file
sys.path[:0] = [str(Path(__file__).parents[1] / "manifests"), str(Path(__file__).parent)]
