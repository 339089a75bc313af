from logpast.cli import main

main()
