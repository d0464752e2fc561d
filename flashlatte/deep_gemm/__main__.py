import sys

from flashlatte.deep_gemm import main

sys.exit(main())
