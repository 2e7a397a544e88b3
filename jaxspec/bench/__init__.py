"""`jaxspec bench`: how long a step takes on this device, beside the least time that it can take. The package may import all else but the
other doors."""
