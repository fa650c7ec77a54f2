"""`python -m llmtrain`: the command line."""

from llmtrain.cli.main import main

if __name__ == "__main__":
    main()
