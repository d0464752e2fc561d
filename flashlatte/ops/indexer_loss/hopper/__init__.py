"""The indexer's loss in Gluon for Hopper (SM90): docs/kernels/indexer-loss.md has the schedules."""
