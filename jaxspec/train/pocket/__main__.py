from jaxspec.train.pocket.recipes import main

if __name__ == "__main__":
    main()
