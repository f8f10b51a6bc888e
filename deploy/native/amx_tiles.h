/* Read by the compiler before every file of a native libllama (`make native`).
 *
 * GCC's _tile_loadconfig (12 and 13 at least, amxtileintrin.h) tells the compiler that it reads 8 of the configuration's
 * 64 bytes. The stores to the others may then be left out, and a processor with AMX ends the process at the first product
 * of matrices (SIGSEGV or SIGILL). Here all 64 are read. Where there is no AMX this is empty.
 */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)))
#endif
