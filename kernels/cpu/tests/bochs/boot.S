# A ROM for Bochs that takes the place of the BIOS: from the reset vector to 64-bit mode with every vector register enabled,
# then a call of the image at 2 MiB. The last 64 KiB of the ROM, which end at 4 GiB; the image fills what is before them.
# At the end it writes "Shutdown" to port 0x8900, which ends Bochs.
    .set ROM_BYTES, 0x100000
    .set IMAGE_BYTES, ROM_BYTES - 0x10000
    .set HERE, 0xffff0000            # where this file is seen
    .set TABLES, 0x1000              # page tables, in memory that nothing else uses
    .set CODE32, 8
    .set DATA, 16
    .set CODE64, 24

    .code16
real:
    cli
    lgdtl %cs:descriptors - real
    movl %cr0, %eax
    orl $1, %eax                     # PE
    movl %eax, %cr0
    ljmpl $CODE32, $(HERE + protected - real)
    .balign 16
segments:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00af9b000000ffff
descriptors:
    .word 4 * 8 - 1
    .long HERE + segments - real

    .code32
protected:
    movl $DATA, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    # one table for the first 512 GiB, in it four pages of 1 GiB
    movl $TABLES, %edi
    xorl %eax, %eax
    movl $2048, %ecx
    cld
    rep stosl
    movl $(TABLES + 0x1000 + 7), TABLES
    movl $0x00000087, TABLES + 0x1000
    movl $0x40000087, TABLES + 0x1008
    movl $0x80000087, TABLES + 0x1010
    movl $0xc0000087, TABLES + 0x1018
    movl $TABLES, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $(1 << 5 | 1 << 9 | 1 << 10 | 1 << 18), %eax   # PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
    movl %eax, %cr4
    movl $0xc0000080, %ecx           # EFER
    rdmsr
    orl $0x100, %eax                 # LME
    wrmsr
    movl %cr0, %eax
    andl $~(1 << 2 | 1 << 3 | 1 << 29 | 1 << 30), %eax  # EM, TS, NW, CD off
    orl $(1 << 31 | 1 << 1), %eax    # PG, MP
    movl %eax, %cr0
    ljmpl $CODE64, $(HERE + long - real)

    .code64
long:
    xorl %ecx, %ecx
    xorl %edx, %edx
    movl $0x600e7, %eax              # XCR0: x87, SSE, AVX, AVX-512, tiles
    xsetbv
    movq $(0x100000000 - ROM_BYTES), %rsi
    movl $0x200000, %edi
    movl $IMAGE_BYTES, %ecx
    rep movsb
    movl $0x1ff000, %esp
    movl $0x200000, %eax
    call *%rax
    leaq goodbye(%rip), %rsi
    movl $0x8900, %edx
    movl $8, %ecx
1:  lodsb
    outb %al, %dx
    loop 1b
2:  hlt
    jmp 2b
goodbye:
    .ascii "Shutdown"

    .org 0xfff0                      # the processor starts here
    .code16
    jmp real
    .org 0x10000
