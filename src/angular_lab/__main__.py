import sys

from angular_lab.cli import main

sys.exit(main())
