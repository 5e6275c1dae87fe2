"""What apexk itself costs on the host: deciding, launching, handing rows to the CPU, setting a transfer up."""
