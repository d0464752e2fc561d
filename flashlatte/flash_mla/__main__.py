import sys

from flashlatte.flash_mla import main

sys.exit(main())
