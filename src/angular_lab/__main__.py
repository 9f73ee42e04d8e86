import sys

from angular_lab.cli.main import main

sys.exit(main())
