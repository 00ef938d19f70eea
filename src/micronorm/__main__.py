"""`python -m micronorm`, and so `torchrun -m micronorm`."""

from micronorm.cli import main

if __name__ == "__main__":
    main()
