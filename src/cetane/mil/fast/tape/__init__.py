"""Tapes: functions as lists of instructions that one compiled loop performs.

onnxruntime starts a kernel for every node, and its product with packed weights waits for memory. A
tape reads weights as they are stored, 8 or 4 bits each, and its threads meet only where they must.

    writer    function -> tape: places of values, and instructions for each op (`ops`)
    code      the tape as data; `place` tells where values lie, and `assembly` makes it of
              instructions
    store     the weights of all functions of a program, in the forms of `weights`
    loop      the compiled loop: it reads instructions by `encoded`; `walk`, `lines` and `moves`
              are parts of it, `products`, `rounded`, `elements` and `quick_attention` its kernels
    function  tapes that run

The code of products, in LLVM's own language, is `vectors` and `dots` of the folder above.
"""
