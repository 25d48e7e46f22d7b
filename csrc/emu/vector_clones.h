// Marks a loop that is built for AVX2 and for any machine; the better one is chosen at run time.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__)
#define DM_VECTOR_CLONES __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define DM_VECTOR_CLONES
#endif
