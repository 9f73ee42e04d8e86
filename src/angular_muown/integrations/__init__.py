"""Host frameworks: one file each, as thin as the host allows. The core never imports them."""
