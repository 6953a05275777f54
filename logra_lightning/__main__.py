"""`python -m logra_lightning fit|validate|test|predict --config FILE`, or `export`."""

from logra_lightning.cli import main

if __name__ == "__main__":
    main()
