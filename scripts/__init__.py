"""What people run. The files parse options, call the package and print."""
