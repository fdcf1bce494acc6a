/* CRC32C (Castagnoli, reflected, initial and final inversion): by instruction where the processor
 * has one, by table elsewhere. Both give the same numbers; a test compares them. */
#include <string.h>

#include "base/pcc_crc.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

/* One entry per half byte: small enough to stay in the first-level cache, and records are all that
 * it is used for. */
uint32_t pcc_crc32c_portable(uint32_t crc, const void *bytes, size_t length_bytes)
{
    static const uint32_t table[16] = {
        0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u, 0x417b1dbcu, 0x5125dad3u,
        0x61c69362u, 0x7198540du, 0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u,
        0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u,
    };
    const uint8_t *at = bytes;

    crc = ~crc;
    for (size_t i = 0; i < length_bytes; i++) {
        crc ^= at[i];
        crc = (crc >> 4) ^ table[crc & 15u];
        crc = (crc >> 4) ^ table[crc & 15u];
    }
    return ~crc;
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) static uint32_t
crc_by_instruction(uint32_t crc, const void *bytes, size_t length_bytes)
{
    const uint8_t *at = bytes;
    uint64_t wide = (uint32_t)~crc;
    uint64_t word;

    for (; length_bytes >= sizeof word; length_bytes -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    uint32_t narrow = (uint32_t)wide;
    for (; length_bytes > 0; length_bytes--, at++)
        narrow = __builtin_ia32_crc32qi(narrow, *at);
    return ~narrow;
}

static bool has_instruction(void)
{
    return __builtin_cpu_supports("sse4.2") != 0;
}

#elif defined(__aarch64__)

/* Spelled as assembler, because neither compiler offers the intrinsics without a global flag. */
static uint32_t crc_by_instruction(uint32_t crc, const void *bytes, size_t length_bytes)
{
    const uint8_t *at = bytes;
    uint32_t value = ~crc;
    uint64_t word;

    for (; length_bytes >= sizeof word; length_bytes -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(value) : "r"(word));
    }
    for (; length_bytes > 0; length_bytes--, at++) {
        const uint32_t byte = *at;
        __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(value) : "r"(byte));
    }
    return ~value;
}

static bool has_instruction(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

#else

static uint32_t crc_by_instruction(uint32_t crc, const void *bytes, size_t length_bytes)
{
    return pcc_crc32c_portable(crc, bytes, length_bytes);
}

static bool has_instruction(void)
{
    return false;
}

#endif

uint32_t pcc_crc32c(uint32_t crc, const void *bytes, size_t length_bytes)
{
    return has_instruction() ? crc_by_instruction(crc, bytes, length_bytes)
                             : pcc_crc32c_portable(crc, bytes, length_bytes);
}
