// Run-time choice of the vector width for the loops that dominate: the compiler emits each marked
// function for several instruction sets and the loader picks one. All give the same bits:
// contraction is off, and the only re-ordered operations are integer maxima and ors.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define ADACOMP_MULTIARCH __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define ADACOMP_MULTIARCH
#endif
