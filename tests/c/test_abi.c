/* Every public function, called from plain C: what it returns, what it refuses and what it writes. */
#include "layer.h"

int main(void) {
    test_library();
    test_patterns();
    test_elementwise();
    test_encoder();
    test_descriptors();
    test_memory_of_operands();
    test_selection();
    test_plans();
    test_compressions();
    test_storages();
    test_eight_bits();
    test_products();
    test_groups();
    printf("%d failures\n", failures);
    return failures > 0;
}
