"""`python -m fourfold`."""

import sys

from fourfold.cli.main import main

sys.exit(main())
