"""`jaxspec info`: what a checkpoint contains, how it would use a device's memory, and what fits a GPU. The package may import all that
`loading` may."""
