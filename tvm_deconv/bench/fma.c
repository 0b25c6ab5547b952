/* Multiply-adds on whole vectors, in registers: the rate that no program exceeds.

   Twelve chains cover a latency of 4 to 5 cycles on two units, and fit in 16 registers with the two factors.
   ELEMENT is float or double, BYTES the size of a vector. */
typedef ELEMENT vector __attribute__((vector_size(BYTES)));

const long fmas_per_step = 12 * BYTES / sizeof(ELEMENT);

double run(long steps, double factor, double summand) {
    vector x = {}, y = {};
    x += (ELEMENT)factor;
    y += (ELEMENT)summand;
    vector a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
    for (long step = 0; step < steps; ++step) {
        a = a * x + y; b = b * x + y; c = c * x + y; d = d * x + y; e = e * x + y; f = f * x + y;
        g = g * x + y; h = h * x + y; i = i * x + y; j = j * x + y; k = k * x + y; l = l * x + y;
        /* Else the compiler sees twelve equal chains and computes one. */
        __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f));
        __asm__ volatile("" : "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
    }
    a += b + c + d + e + f + g + h + i + j + k + l;
    return a[0];
}
