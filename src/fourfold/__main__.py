"""`python -m fourfold`."""

import sys

from fourfold.cli.entry import main

sys.exit(main())
