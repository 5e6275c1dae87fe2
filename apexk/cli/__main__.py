import sys

from apexk.cli import main

sys.exit(main())
