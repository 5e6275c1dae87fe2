"""Host kernels of apexk: the grouped expert FFN, one source file an instruction set, loaded through ctypes."""
